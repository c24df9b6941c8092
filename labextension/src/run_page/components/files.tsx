import { formatBytes, formatCount } from "../../shared/units";
import type { RunPageModel } from "../page_model";
import type { PageFiles } from "../records";
import { formatTime } from "./facts";

/** The files that the ranks have written, as download links. */
export function Files({ model, files }: { model: RunPageModel; files: PageFiles }) {
  const shortId = model.run.slice(0, 4);
  return (
    <section class="sgpu-page-files" aria-label="files">
      <h3>
        Files{" "}
        <button type="button" onClick={() => void model.refresh()}>
          Refresh
        </button>
      </h3>
      {files.files.length > 0 && (
        <table>
          <tbody>
            {files.files.map(({ name, size, changed_at }) => (
              <tr key={name}>
                <th scope="row">
                  <a href={model.fileUrl(name)} download={name.split("/").pop() ?? name}>
                    {name}
                  </a>
                </th>
                <td class="sgpu-page-number">{formatBytes(size)}</td>
                <td>{formatTime(changed_at)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {files.files.length === 0 && files.cwd === "" && <p>The ranks have written no files to their work or checkpoint folder.</p>}
      {files.more && (
        <p>
          The first {formatCount(files.files.length)} files are listed; <code>sgpu cp {shortId}: FOLDER</code> copies all.
        </p>
      )}
      {files.cwd !== "" && (
        <p>
          The ranks' working directory was <code>{files.cwd}</code> on this server's machine: other files that they wrote are
          there.
        </p>
      )}
    </section>
  );
}
